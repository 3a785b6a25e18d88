"""`python -m hal_attn.cli` is `hal-attn`."""

from hal_attn.cli import main

main()
