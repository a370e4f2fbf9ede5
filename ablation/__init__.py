"""The ablation: families of drafters trained and decoded on equal terms, in one table and one report."""
