"""The command line: ``python -m fusion_pass`` (installed: ``fusion-pass``)."""
