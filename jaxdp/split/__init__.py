"""Split Adaptation: a client adapts a server's transformer without showing its images."""
