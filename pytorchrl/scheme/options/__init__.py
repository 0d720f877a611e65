"""The options of a scheme: declarations, and their conversion from and to flat keywords."""
