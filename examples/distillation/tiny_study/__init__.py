"""Distillation between models so small that the theory's statements can be measured in minutes."""
