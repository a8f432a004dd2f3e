"""PyTorch: `model.py` reads exported programs, the other files hold the converters of operators."""
