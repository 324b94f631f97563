"""Jobs that are started on other machines over ssh (`rallyctl launch`)."""
