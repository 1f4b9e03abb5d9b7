"""The volume plugin: gRPC services of the Container Storage Interface over one volume service."""
