"""What a volunteer sees: one Progress, shown in a notebook, as HTML, or as text."""
