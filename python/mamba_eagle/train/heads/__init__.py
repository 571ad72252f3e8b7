"""The kinds of draft heads that can be trained, one file each; ``registry.py`` names them."""
