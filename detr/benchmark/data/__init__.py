"""How fast the data pipeline is, what it pads and what its workers hold in memory."""
