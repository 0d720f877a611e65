"""The runtime whose workers are processes of this machine, which exchange messages through shared memory."""
