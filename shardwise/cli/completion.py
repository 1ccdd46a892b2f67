"""``shardwise completion bash | zsh | fish``: prints a script with every command, option and setting in it.

The script is made from the parser and from the source of the settings. It asks nobody while somebody types.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardwise.cli.settings import setting_choices
from shardwise.cli.wording import describe

__all__ = ["RECIPE_NAMES", "add_completion", "completion_script"]


@dataclass(frozen=True)
class _Option:
    names: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    help: str


@dataclass(frozen=True)
class _Command:
    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]
    """What its first argument may be, besides a path."""


def add_completion(parser: argparse.ArgumentParser, top: Callable[[], argparse.ArgumentParser]) -> None:
    describe(
        parser,
        "Print a script that completes commands, options, settings and their values when Tab is pressed. It is static: "
        "print it again after an upgrade, or at the start of every shell.",
        'eval "$(shardwise completion bash)"                            # in ~/.bashrc',
        'eval "$(shardwise completion zsh)"                             # in ~/.zshrc, after compinit',
        "shardwise completion fish > ~/.config/fish/completions/shardwise.fish",
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    parser.set_defaults(run=lambda options: _completion(options, top()))


def _completion(options: argparse.Namespace, top: argparse.ArgumentParser) -> int:
    print(completion_script(options.shell, top), end="")
    return 0


def completion_script(shell: str, top: argparse.ArgumentParser) -> str:
    """Returns the script for a shell and a command line."""
    return "\n".join((*_SCRIPTS[shell](tuple(_commands_of(top))), ""))


# --- what there is to complete ------------------------------------------------------------------------------------


def _commands_of(top: argparse.ArgumentParser) -> Iterator[_Command]:
    (commands,) = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    for name, parser in commands.choices.items():
        options = tuple(
            _Option(
                tuple(action.option_strings),
                action.nargs != 0,
                tuple(map(str, action.choices or ())),
                (action.help or "").split(" (default")[0],
            )
            for action in parser._actions
            if action.option_strings
        )
        positional = [action for action in parser._actions if not action.option_strings]
        words = tuple(map(str, positional[0].choices or ())) if positional else ()
        if any(_SET in option.names for option in options):
            # Written here, as importing the recipes would import torch.
            words = RECIPE_NAMES
        yield _Command(name, helps.get(name, ""), options, words)


_SET = "--set"
RECIPE_NAMES = ("tiny", "small", "llama-125m", "llama-1b", "llama-8b")


# --- bash ---------------------------------------------------------------------------------------------------------


def _bash(commands: tuple[_Command, ...]) -> Iterator[str]:
    names = " ".join(command.name for command in commands)
    yield "# completion of shardwise for bash"
    yield "_shardwise() {"
    yield '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" name="" choices=""'
    yield '    local before="${COMP_WORDS[COMP_CWORD-2]}" command="${COMP_WORDS[1]}" options="" words=""'
    yield "    COMPREPLY=()"
    yield "    if (( COMP_CWORD == 1 )); then"
    yield f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$cur")); return'
    yield "    fi"
    yield "    # bash divides NAME=VALUE at the = sign, unless it was told otherwise."
    yield '    if [[ $cur == "=" ]]; then name=$prev cur=""'
    yield '    elif [[ $prev == "=" ]]; then name=$before'
    yield '    elif [[ $prev == --set && $cur == *=* ]]; then name=${cur%%=*} choices="$name="; fi'
    yield "    if [[ -n $name ]]; then"
    yield "        case $name in"
    for setting, choices in setting_choices().items():
        if choices:
            yield f'            {setting}) words="{" ".join(choices)}" ;;'
    yield "        esac"
    yield "        if [[ -z $words ]]; then compopt -o filenames"
    yield '            mapfile -t COMPREPLY < <(compgen -f -- "${cur#*=}"); return; fi'
    yield '        COMPREPLY=($(compgen -P "$choices" -W "$words" -- "${cur#*=}")); return'
    yield "    fi"
    yield "    case $command in"
    for command in commands:
        flags = " ".join(name for option in command.options for name in option.names)
        yield f'        {command.name}) options="{flags}" words="{" ".join(command.words)}" ;;'
    yield "    esac"
    yield "    case $command:$prev in"
    yield (
        f'        {_pattern(commands)}) COMPREPLY=($(compgen -S = -W "{" ".join(setting_choices())}" -- "$cur"));'
        " compopt -o nospace; return ;;"
    )
    for name, option in _with_choices(commands):
        pattern = "|".join(f"{name}:{flag}" for flag in option.names)
        yield f'        {pattern}) COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$cur")); return ;;'
    yield "    esac"
    yield '    if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$cur")); return; fi'
    yield "    compopt -o filenames"
    yield '    mapfile -t COMPREPLY < <(compgen -f -- "$cur")'
    yield '    if (( COMP_CWORD == 2 )); then COMPREPLY+=($(compgen -W "$words" -- "$cur")); fi'
    yield "}"
    yield "complete -F _shardwise shardwise"


def _pattern(commands: tuple[_Command, ...]) -> str:
    """Returns what the shell matches where a setting is typed, in any command that takes settings."""
    return "|".join(
        f"{command.name}:{_SET}"
        for command in commands
        if any(_SET in option.names for option in command.options)
    )


def _with_choices(commands: tuple[_Command, ...]) -> Iterator[tuple[str, _Option]]:
    for command in commands:
        for option in command.options:
            if option.takes_value and option.choices:
                yield command.name, option


# --- zsh ----------------------------------------------------------------------------------------------------------


def _zsh(commands: tuple[_Command, ...]) -> Iterator[str]:
    yield "#compdef shardwise"
    yield "_shardwise() {"
    yield "    local -a found"
    yield "    if (( CURRENT == 2 )); then"
    yield "        found=("
    for command in commands:
        yield f"            {shlex.quote(f'{command.name}:{command.help}')}"
    yield "        )"
    yield "        _describe command found; return"
    yield "    fi"
    yield '    if [[ $words[CURRENT-1] == --set && $PREFIX == *"="* ]]; then'
    yield "        local name=${PREFIX%%=*}"
    yield "        compset -P '*='"
    yield "        case $name in"
    for setting, choices in setting_choices().items():
        if choices:
            yield f"            {setting}) compadd -- {' '.join(choices)}; return ;;"
    yield "        esac"
    yield "        _files; return"
    yield "    fi"
    yield "    case $words[2]:$words[CURRENT-1] in"
    yield f"        {_pattern(commands)}) compadd -S = -- {' '.join(setting_choices())}; return ;;"
    for name, option in _with_choices(commands):
        pattern = "|".join(f"{name}:{flag}" for flag in option.names)
        yield f"        {pattern}) compadd -- {' '.join(option.choices)}; return ;;"
    yield "    esac"
    yield "    if [[ $PREFIX == -* ]]; then"
    yield "        case $words[2] in"
    for command in commands:
        yield f"            {command.name}) found=("
        for option in command.options:
            for flag in option.names:
                yield f"                {shlex.quote(f'{flag}:{option.help}')}"
        yield "            ) ;;"
    yield "        esac"
    yield "        _describe option found; return"
    yield "    fi"
    yield "    if (( CURRENT == 3 )); then"
    yield "        case $words[2] in"
    for command in commands:
        if command.words:
            yield f"            {command.name}) compadd -- {' '.join(command.words)} ;;"
    yield "        esac"
    yield "    fi"
    yield "    _files"
    yield "}"
    yield "compdef _shardwise shardwise"


# --- fish ---------------------------------------------------------------------------------------------------------


def _fish(commands: tuple[_Command, ...]) -> Iterator[str]:
    yield "# completion of shardwise for fish"
    yield "complete -c shardwise -f -n __fish_use_subcommand -l version"
    for command in commands:
        yield (
            f"complete -c shardwise -f -n __fish_use_subcommand -a {command.name} -d {_fish_text(command.help)}"
        )
    for command in commands:
        here = f"-n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            flags = " ".join(
                f"-{'l' if flag.startswith('--') else 's'} {flag.lstrip('-')}" for flag in option.names
            )
            values = ""
            if option.choices:
                values = f" -x -a {_fish_text(' '.join(option.choices))}"
            elif _SET in option.names:
                values = f" -x -a {_fish_text(' '.join(_assignments()))}"
            elif option.takes_value:
                values = " -r"
            yield f"complete -c shardwise {here} {flags} -d {_fish_text(option.help)}{values}"
        if command.words:
            yield f"complete -c shardwise {here} -a {_fish_text(' '.join(command.words))}"


def _assignments() -> Iterator[str]:
    for name, choices in setting_choices().items():
        yield f"{name}="
        yield from (f"{name}={choice}" for choice in choices)


def _fish_text(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: dict[str, Callable[[tuple[_Command, ...]], Iterator[str]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
