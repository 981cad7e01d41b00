"""Small classes that hook into the training loop; one concern each."""
