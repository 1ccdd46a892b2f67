"""Programs that know torch's FSDP alone; the tests run each of them on torch's and on ours."""
