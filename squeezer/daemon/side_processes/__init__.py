"""The processes of a side task: started, contained, found, counted, and ended with all that they leave."""
