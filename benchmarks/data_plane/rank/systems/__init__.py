"""One adapter per compared system. Each follows the documentation of its system."""
