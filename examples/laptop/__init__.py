"""Small models and verifiable problems for the laptop experiments in configs/."""
