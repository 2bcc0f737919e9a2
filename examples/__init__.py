"""Programs that use stepwell through its public interface only."""
