import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))       # helpers of these tests, imported by their own names
