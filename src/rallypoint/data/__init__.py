"""The samples that a worker of an elastic job processes, and their order. For use in workers; torch is not imported."""
