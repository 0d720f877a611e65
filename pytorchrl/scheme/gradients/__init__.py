"""Gradients: workers that turn data into gradients, and the thread that feeds them."""
