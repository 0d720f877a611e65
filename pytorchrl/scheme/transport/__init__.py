"""Messages between workers: how they are encoded, sent, received and counted."""
