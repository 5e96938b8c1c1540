"""Strictly on-policy GRPO with periodic asynchrony, shown live and stepped like a debugger."""
