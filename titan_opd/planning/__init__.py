"""What a configuration will need, before anything runs: memory, operations, communication, the balance of its roles."""
