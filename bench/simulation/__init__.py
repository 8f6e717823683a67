"""The scheduler on a discrete-event clock: traffic, boxes, a router between them, and what users would see of it."""
