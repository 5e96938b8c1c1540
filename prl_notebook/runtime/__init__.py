"""Background processes and devices."""
