/** Texts of the job page that single tabs load: incidents, timeline, protection, checkpoints, events, logs and spec. */
import { plural } from '../model/format'

export const TIMELINE = {
  title: 'Timeline', span: 'Range of the timeline', all: 'All',
  job: 'Status', recovery: 'Recovery',
  works: (node: string) => `${node} works for this job`,
  phase: (phase: string, incident: string) => `${phase}, incident ${incident}`,
  fault: (label: string) => `Fault: ${label}`,
  faultKey: 'fault', nodeKey: 'node works for the job',
  utc: 'UTC',
  label: (nodes: string, incidents: string, time: string) => `Timeline of ${nodes} and ${incidents} over ${time}`,
  some: (drawn: string, nodes: string) => `${drawn} of ${nodes}`,
  more: (nodes: string) => `Show ${nodes}`,
  faultsFirst: 'Nodes with faults come first.',
} as const

/** The parts of a job's time: for each a label, its meaning, and the person or system that can shorten it. */
export const TIME = {
  none: 'No time has been counted yet.',
  total: (time: string) => `Together ${time} since the job was created.`,
  ettr: (ratio: string) => `ETTR ${ratio}: training time ÷ time since the first start, without time in the queue.`,
  buckets: {
    queue: { label: 'Queue', what: 'waits for its turn', owner: 'you: priority, larger fleet' },
    provision: { label: 'Provision', what: 'waits for its first nodes', owner: 'AWS: capacity; you: spares' },
    start: { label: 'Start', what: 'launches before the first step', owner: 'your script: imports, compilation, data' },
    train: { label: 'Train', what: 'productive steps', owner: '' },
    shortage: {
      label: 'Shortage', what: 'share of training time lost to missing nodes', owner: 'AWS: capacity; you: spares',
    },
    stall: { label: 'Stall', what: 'ranks run without a step', owner: 'your script: data, evaluation, hangs' },
    detect: { label: 'Detect', what: 'from a failure to its detection', owner: 'Everstep: --detection-seconds' },
    replace: { label: 'Replace', what: 'replacing nodes after a failure', owner: 'Everstep and AWS: spares' },
    restore: { label: 'Restore', what: 'restoring state, up to the first new step', owner: 'Everstep' },
    rework: { label: 'Rework', what: 'recomputing steps', owner: 'Everstep: more copies, checkpoints' },
    stopping: { label: 'Stopping', what: 'an agreed stop', owner: 'your script: its longest step' },
    paused: { label: 'Paused', what: 'without nodes', owner: 'you: resume, priority, larger fleet' },
    unaccounted: {
      label: 'Unaccounted', what: 'no control plane was running', owner: 'the operator of the control plane',
    },
  },
  rest: { running: 'Not counted yet', ended: 'Not counted', what: 'since the control plane last counted', owner: '' },
  owner: (owner: string) => `Who can shorten it: ${owner}`,
  unknownOwner: 'unknown',
} as const

export const PROTECTION_TAB = {
  state: 'Protection', committed: 'Committed in memory', proposed: 'Being replicated', copies: 'Copies of each shard',
  ownIncluded: (copies: string) => `${copies}, with the owner’s`, parity: 'Parity',
  parityGroup: (size: string) => `one lost node per group of ${size}`,
  survives: 'Survives any 1 node loss', checkpoint: 'Newest checkpoint',
  odds: {
    title: 'Losses at the same time', lost: 'Lost', survives: 'Every shard stays in memory', otherwise: 'Otherwise',
    any: (what: string) => `any ${what}`, always: 'always', never: 'never',
    cases: (share: string) => `in ${share} of the cases`,
    checkpoint: (step: string, steps: string) => `back to step ${step} in S3: ${steps} to recompute`,
    start: 'back to the start: no checkpoint is in S3',
    note: 'Counted over all sets of this many nodes or failure domains, for the current holders.',
    domains: 'A failure domain is the network node above the instances.',
    noDomains: 'AWS reports no failure domains for these nodes.',
    fatal: 'One domain is enough', fatalText: (domains: string) => `All copies of a shard are below ${domains}.`,
  },
  shards: 'Shards and their holders',
  empty: 'Memory holds no shard',
} as const

export const MATRIX = {
  cells: { own: 'owner', copy: 'copy', behind: 'behind', out: 'not counted' },
  nothing: 'holds nothing',
  rank: (rank: number) => `rank ${rank}`,
  at: (cell: string, rank: number, node: string, held: string) => `${cell}: rank ${rank} on ${node}${held}`,
  label: (shards: string, nodes: string, problems: string) => `Holders of ${shards} on ${nodes}; ${problems}`,
  problems: (shards: number) => `${plural(shards, 'shard')} with a problem`,
  keys: {
    own: '● the owner’s copy', copy: '✓ counted copy', parity: '✓ counted parity share',
    behind: '− behind the committed step',
    out: '! not counted', lag: '−n: n steps behind the newest',
  },
  bad: (bad: number, all: string) =>
    `${plural(bad, 'shard')} of ${all} ${bad === 1 ? 'has' : 'have'} a problem. ` +
    `The table lists ${bad === 1 ? 'its' : 'their'} copies first.`,
  good: (what: string) => `Every shard has all its ${what} of the newest committed step.`,
  copies: 'copies', shares: 'shares',
  table: {
    title: 'All copies', rank: 'Rank', node: 'Node', copies: 'Copies', state: 'State', step: 'Step', lag: 'Lag',
    verified: 'Verified', domain: 'Failure domain', size: 'Size', problem: 'Problem',
  },
  of: (a: number, b: number) => `${a} of ${b}`,
  unknownDomain: 'unknown',
  behindOthers: (steps: string) => `${steps} behind the other shards`,
  more: (some: string, all: string) => `Show ${some} more of ${all} copies`,
  unverified: 'nothing verified yet', held: (step: string) => `step ${step}`,
  lag: (steps: string) => `, ${steps} behind the ranks`,
  verified: (ago: string) => `, verified ${ago}`, below: (domain: string) => `, below ${domain}`,
} as const

export const CHECKPOINTS_TAB = {
  uploading: (step: string, share: string, rank: number, stored: string, total: string) =>
    `Uploading the checkpoint of step ${step}: ${share} (rank ${rank}: ${stored} of ${total})`,
  columns: {
    step: 'Step', status: 'Status', launch: 'Launch', size: 'Size', complete: 'Complete', verified: 'Verified',
    manifest: 'Manifest', actions: 'Actions',
  },
  pinned: 'pinned', notVerified: 'not yet',
  create: 'Create a checkpoint', createTitle: 'Stores the newest committed step, or a later one, in S3',
  requestedStep: (step: string) => `Everstep stores step ${step} or the next step.`,
  actions: {
    of: (verb: string, step: number, launch: number) => `${verb} step ${step} of launch ${launch}`,
    verify: 'Verify', verifyTitle: 'Reads all objects back and compares their hashes with the manifest',
    pin: 'Pin', pinTitle: 'Protects the checkpoint from deletion', unpin: 'Unpin',
    delete: 'Delete', deleteName: (step: number) => `step ${step}`,
    deleteText: (job: string, launch: number) =>
      `Everstep deletes this checkpoint of ${job}, launch ${launch}, from S3 for good. ` +
      'It refuses if an unfinished job would restore from the checkpoint.',
  },
  more: (number: string, all: string) => `Show ${number} more of ${all}`,
  export: 'Export a checkpoint',
  exportText:
    'Export the model as safetensors files to a folder, with your own AWS credentials. ' +
    '--format dcp and --format deepspeed-universal include the optimizer. A target in S3 is s3://bucket/prefix.',
  empty: 'No checkpoint in S3',
  policy: (policy: string) => `Everstep stores a checkpoint ${policy}.`, onStop: 'when the job stops',
  next: (step: string) => `The next one is due at step ${step}.`,
  memory: 'The Protection tab lists the steps in memory.',
} as const

export const EVENTS_TAB = {
  filter: 'Filter events', placeholder: 'Filter by type, text or node',
  columns: { when: 'Time', event: 'Event', message: 'Message', node: 'Node' },
  noMatch: 'No event contains this text.', none: 'No event yet.',
  newest: (most: number, all: string) => `The newest ${most} of ${all}. The filter searches the others, too.`,
  older: 'Load older events',
  loaded: (number: string) => `The newest ${number} events are loaded and searched, back to`,
} as const

export const LOGS = {
  none: 'No log yet', noneText: 'The job has not been launched. Ranks print after a launch.',
  rank: 'Rank', allRanks: 'All ranks', rankOf: (rank: number) => `Rank ${rank}`,
  launch: 'Launch', allLaunches: 'All launches', launchOf: (launch: number) => `Launch ${launch}`,
  find: 'Find in the log', findPlaceholder: 'Find  ( / )', hits: 'Matching lines',
  hit: (n: string, all: string) => `${n} of ${all}`,
  noHit: 'not in the loaded lines', previous: 'Previous', next: 'Next', only: 'Only matches, in the whole log',
  wrap: 'Wrap',
  following: { word: 'Following', title: 'New lines appear when they are printed' },
  complete: { word: 'Complete', title: 'The job has ended, and every line is here' },
  connecting: { word: 'Connecting', title: 'New lines do not appear yet' },
  notFollowing: { word: 'Not following', title: 'New lines do not appear' },
  toNewest: 'To the newest', toFailure: 'To the failure', atIncident: (id: string) => `Log at incident ${id}`,
  loaded: (lines: string, isFull: boolean) => `${lines} loaded${isFull ? ', the most that a page holds' : ''}`,
  download: 'Download these lines', broken: 'The log cannot be read further',
  notFoundYet: 'No match in the lines that were searched so far.', noMatch: 'No line contains this text.',
  nothing: 'The ranks printed nothing.', nothingYet: 'The ranks have printed nothing yet.',
  back: 'Search older lines', on: 'Search newer lines',
  hint: 'Click a time to put the line into the address. In a terminal:',
  box: 'Lines of the log', node: 'node', newLines: '↓ New lines',
} as const

export const SPEC = {
  form: 'Format',
  note: (revision: number) =>
    `The request that creates this job again as of revision ${revision}, under another name. Its source is`,
  revisions: 'Revisions',
  one: 'The job is as it was submitted. The next revision comes with',
  from: 'From', to: 'To', revision: (number: number) => `Revision ${number}`,
  differ: (fields: string, isOne: boolean) => `${fields} differ${isOne ? 's' : ''}.`,
  made: (revision: number) => `Revision ${revision} is from`,
  planned: (revision: number) => `The running launch uses revision ${revision}.`,
  region: (from: number, to: number) => `From revision ${from} to ${to}`,
  nextLaunch: 'from the next launch on',
} as const
