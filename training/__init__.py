"""Training: text to packed rows, losses, schedules and one LightningModule. Imports mtp, never decoding."""
