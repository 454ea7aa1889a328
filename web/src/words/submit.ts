/** Every text of the page that submits a job. */
export const SUBMIT = {
  title: 'Submit a job',
  verdict: {
    start: { lead: 'Describe the job.', text: 'The plan checks the request and creates nothing.' },
    wrong: (fields: number) => ({
      lead: `${fields} ${fields === 1 ? 'field needs' : 'fields need'} a correction.`,
      text: 'The job is not submitted yet.',
    }),
    planned: { lead: 'The request is valid.', text: 'Nothing is created until you submit the job.' },
  },
  viewer: {
    title: 'Your role cannot submit jobs',
    text: 'Ask an administrator for a token with the role submitter.',
  },
  form: 'Form',
  begin: {
    label: 'Copy from',
    placeholder: 'an earlier job',
    text: 'Fills the form with the code and the settings of an earlier job.',
    copied: (job: string) => `The form has the code and the settings of ${job}. Choose a new name.`,
  },
  name: 'Name',
  fleet: { label: 'Fleet', only: 'the only fleet' },
  source: {
    label: 'Source',
    text: 'Id of an uploaded archive (SHA-256). The command everstep jobs submit uploads a folder.',
  },
  entryPoint: { label: 'Entry point', text: 'A Python file in the source' },
  nodes: 'Nodes',
  ranks: 'Ranks per node',
  copies: 'Copies',
  parity: 'Parity group',
  checkpoint: { label: 'Checkpoint every', suffix: ' steps' },
  hyperparameters: { label: 'Hyperparameters', text: 'One per line: steps=200' },
  yaml: { label: 'YAML', text: 'All fields of CreateTrainingJob. The form and the YAML follow each other.' },
  failed: 'The job was not submitted',
  problem: (field: string, text: string) => `${field}: ${text}`,
  submit: 'Submit',
  plan: { button: 'Show the plan', label: 'The plan', title: 'Plan' },
  command: 'Command line',
  problems: {
    missing: 'is missing',
    name: 'must be 1 to 63 letters, digits and single hyphens',
    source: 'must be the id of an uploaded source: 64 hexadecimal digits',
    whole: (least: number) => `must be a whole number, at least ${least}`,
    copies: (copies: number, nodes: number) => `${copies} copies need ${copies} nodes, NodeCount is ${nodes}`,
    parity: (size: number, nodes: number) => `groups of ${size} nodes need ${size} nodes, NodeCount is ${nodes}`,
  },
} as const

/** Every text of the plan of a dry run. */
export const PLAN = {
  start: 'The job would start now',
  wait: 'The job would wait for nodes',
  place: (position: number) => `The job would be number ${position} in the queue`,
  free: (free: string, fleet: string, isOne: boolean, wanted: string) =>
    `${free} of ${fleet} ${isOne ? 'is' : 'are'} free, and the job needs ${wanted}.`,
  launch: (instances: string) => `The fleet would start ${instances}.`,
  behind: (jobs: readonly string[]) => `Jobs ahead: ${jobs.join(', ')}.`,
  losses: { 1: 'any 1 node', 2: 'any 2 nodes', 3: 'any 3 nodes' } as Record<number, string>,
  otherLoss: (nodes: number) => `any ${nodes} nodes`,
  always: (loss: string) => `${loss}: always`,
  sometimes: (loss: string, share: string) => `${loss}: in ${share} of the cases`,
  labels: {
    fleet: 'Fleet', ranks: 'Ranks', copies: 'Copies in memory', parity: 'Parity in memory', memory: 'Memory per node',
    losses: 'Losses that memory survives', state: 'State per rank', price: 'Price', limit: 'Cost limit',
    mttf: 'Mean time to failure', mttr: 'Mean time to recovery', ettr: 'Expected ETTR',
  },
  ranks: (ranks: string, nodes: string, perNode: string) => `${ranks}: ${nodes} with ${perNode} each`,
  groups: (size: number) => `groups of ${size} nodes`,
  memory: (ratio: string, copies: string) => `${ratio} × the state of its ranks; 2 copies need ${copies} ×`,
  state: (bytes: string, slots: string, memory: string) => `at most ${bytes}: ${slots} in ${memory} per node`,
  perHour: (price: string) => `${price}/h`,
} as const
