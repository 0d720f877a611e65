"""Messages between workers: encoding, sending, receiving and statistics."""
