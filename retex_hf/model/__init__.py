"""`RetexModel`: building, running, changing, saving and sharing."""
