"""How boxes become files: plans, guarded metadata, durable writes."""
