"""What clients and servers do so that less can be learned from what they exchange."""
