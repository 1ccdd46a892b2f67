"""Small models of transformers, and data for them."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def tiny_llama(*, tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        use_cache=False,
        attn_implementation="eager",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


class Tokens(Dataset):
    """Random sequences, the same on every rank."""

    def __init__(self, count: int = 16, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(2)
        self.rows = torch.randint(3, VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row.clone(), "attention_mask": torch.ones_like(row)}
