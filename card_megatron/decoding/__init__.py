"""Generation of text: several tokens a pass, over a cache of keys and values, with any model that has a backend."""
