"""The runtime whose workers are actors of Ray; this folder contains every import of Ray."""
