"""How the workers of a group meet: addresses, stores, rendezvous."""
