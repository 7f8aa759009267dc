"""The numbers that decide how patient everybody is fit together."""

from tensorhub.protocol.settings import Settings


def test_a_worker_stops_trusting_before_the_server_stops_believing() -> None:
    settings = Settings()
    fastest, slowest = 1 + settings.drift / 2, 1 - settings.drift / 2  # of two clocks, 10 % apart
    assert settings.trust_s / slowest < settings.lease_s / fastest


def test_a_few_lost_reports_do_not_end_a_lease() -> None:
    settings = Settings()
    assert settings.lease_s - 3 * settings.report_s >= 5.0


def test_other_numbers_scale() -> None:
    assert Settings(lease_s=4.0, drift=0.25).trust_s == 3.0
