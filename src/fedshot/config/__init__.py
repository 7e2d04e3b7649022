"""The configuration: its sections and components, how it is read and checked, option help."""
