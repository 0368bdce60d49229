"""Parts of `scripts/train_tiny_models.py`: models, task, training, measuring, files."""
