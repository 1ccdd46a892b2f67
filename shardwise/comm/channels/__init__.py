"""How a group's data travels, and the log of collectives by which ranks notice that they diverge."""
