// All sections, in the order of the page: first what a person looks for at a glance, last what is typed.

import { dead } from "./dead.js";
import { decisions } from "./decisions.js";
import { environments } from "./environments.js";
import { findings } from "./findings.js";
import { flow } from "./flow.js";
import { latency } from "./latency.js";
import { learning } from "./learning.js";
import { ledger } from "./ledger.js";
import { machines } from "./machines.js";
import { overview } from "./overview.js";
import { settings } from "./settings.js";
import { waits } from "./waits.js";
import { workers } from "./workers.js";

export const SECTIONS = [
  overview, findings, flow, learning, waits, latency, environments, workers, machines, ledger, dead, decisions, settings,
];
