"""The claims of the papers about multi-scale deformable attention, one module each (docs/findings.md)."""
