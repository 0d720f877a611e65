"""Write the values of options as text or JSON, and read them; no other module does so.

| form | example | written by | read by | used in |
|---|---|---|---|---|
| text that a user types | `linear:0.001:0` | `text.to_text` | `text.parse` | flags, help, configuration files |
| Python | `linear(0.001, 0.0)` | `text.to_python` | | `repr`, errors, records, documentation |
| JSON | `{"schedule": ["linear", 0.001, 0.0]}` | `descriptions.to_json` | `descriptions.from_json` | files of a run |

The two modules are separate because `text` imports neither PyTorch nor the parts of an agent, so that the command line
starts quickly, and so that the classes of options can import it.
"""
