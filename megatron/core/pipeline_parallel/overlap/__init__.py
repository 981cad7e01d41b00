"""What a schedule and a layer agree on so that communication of one microbatch can hide behind another."""
