"""Building blocks of vision towers."""
