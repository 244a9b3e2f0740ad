"""fedveil as an app of Flower: what its server and its nodes run, and how a run is launched."""
