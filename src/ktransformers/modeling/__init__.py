"""Stock models of transformers: opened, loaded without their experts, and given faster forms of some modules."""
