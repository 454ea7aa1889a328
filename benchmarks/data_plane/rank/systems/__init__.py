"""One adapter per system that is measured beside Everstep, each as its own documentation would have it used."""
