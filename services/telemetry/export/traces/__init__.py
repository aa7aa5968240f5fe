"""Traces: the way of single groups as trees of spans, sent by OTLP."""
