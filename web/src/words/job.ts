/** Every text of the job page: its verdict, what to do, and the tabs. Causes and phases are in `causes.ts`. */

/** The state of the job: short titles, and the first sentences of the verdict. */
export const STATE = {
  titles: {
    completed: 'Completed', failed: 'Failed', stopped: 'Stopped', stopping: 'Stopping', stalled: 'Stalled',
    recovering: 'Recovering', recomputing: 'Recomputing steps', starting: 'Starting', training: 'Training',
    paused: 'Paused', pausing: 'Pausing', interrupted: 'Interrupted', returning: 'Returning nodes', queued: 'Queued',
    notRecovering: 'Not recovering', unknown: 'Unknown',
  },
  atStep: (title: string, step?: string) => (step === undefined ? `${title}.` : `${title} at step ${step}.`),
  completed: (steps?: string) => (steps === undefined ? 'Completed.' : `Completed after ${steps}.`),
  training: (step: string | undefined, nodes: string, pace: string) =>
    `Training ${step === undefined ? 'before the first step' : `at step ${step}`}${nodes}${pace}.`,
  onNodes: (nodes: string) => ` on ${nodes}`,
  slower: (share: string) => `, at ${share} of the usual rate`,
  faster: (factor: string) => `, at ${factor} times the usual rate`,
  grows: 'The job grows again when capacity returns.',
  recomputing: (step: string, reached: string) => `Recomputing steps: at step ${step} of ${reached}.`,
  stalled: (step: string, last: string) => `Stalled at step ${step}: the last step was ${last}.`,
  stalledUnseen: (step: string, opened: string) =>
    `Stalled at step ${step}: no step since this page was opened ${opened}.`,
  stalledAtStart: (time: string) => `Stalled: the ranks have run for ${time} without a step.`,
  firstStep: (time: string) => `Starting: the ranks have run for ${time}, before the first step.`,
  firstStepAgain: (time: string) => `Recovering: the ranks have run for ${time}, before the first new step.`,
  unknownTime: 'an unknown time',
  reached: (step: string) => `Training had reached step ${step}.`,
  recovering: (phase: string, elapsed: string, usual?: string) =>
    `Recovering: ${phase} for ${elapsed}${usual === undefined ? '' : `, usually ${usual}`}.`,
  waiting: (title: string, missing: string) => `${title}: waiting for ${missing}.`,
  nextAttempt: (isShort: boolean, when: string) =>
    `${isShort ? 'AWS is out of capacity' : 'AWS launched no instance'}; next attempt ${when}.`,
  notRecovering: (person: string) => `Not recovering: ${person} has taken over the job.`,
  person: 'a person',
  unknown: 'The control plane has not reported a status for this job.',
  lastKnown: (state: string) => `Last known: ${state}`,
  stale: (time: string) => `The control plane has not answered for ${time}.`,
  refused: (time: string, error: string) => `The control plane has returned errors for ${time}: ${error}`,
  rate: { perSecond: (steps: string) => `${steps} steps/s`, perStep: (time: string) => `${time} per step` },
} as const

/** Sentences about the steps that are safe in memory and in S3. */
export const KEPT = {
  unknown: 'Protection is unknown.',
  survives: (nodes: string) => `Any ${nodes} can fail without the loss of a step.`,
  noLoss: 'The loss of 1 node loses the steps since the newest checkpoint in S3.',
  degraded: (reason: string) => `Degraded: ${reason}`,
  tooFewCopies: 'some shards have too few copies.',
  unprotected: 'Unprotected: memory holds no committed step.',
  unprotectedStep: (reason: string) => `Unprotected: ${reason}`,
  notYet: 'Not yet protected: memory holds no committed step.',
  unconfirmed: (healthy: string, wanted: string) =>
    `Protection is unconfirmed: ${healthy} of ${wanted} nodes are healthy.`,
  checkpoint: (step: string) => `The checkpoint of step ${step} is in S3.`,
  noCheckpoint: 'No checkpoint is in S3.',
  noStep: 'No step was lost: the job had made none.',
  lostNothing: (step: string) => `No step was lost: step ${step} is in S3.`,
  lostSome: (lost: string, step: string) =>
    `${lost} after the checkpoint of step ${step} ${lost.startsWith('1 ') ? 'is' : 'are'} lost.`,
  lostAll: (lost: string) => `${lost} ${lost.startsWith('1 ') ? 'is' : 'are'} lost: no checkpoint is in S3.`,
} as const

/** What the reader must do. `brief`: a clause that follows "Act now", or a sentence. `duty.ts` has the urgencies. */
export const ACT = {
  noNews: {
    brief: 'check the control plane',
    text: 'Training continues without the control plane, but a recovery waits for it.',
    check: 'Check that the control plane runs: everstep server answers at /v1/health.',
    log: 'Search the log of the control plane for the request id of the error.',
  },
  failed: {
    brief: 'correct the cause, and submit the job again',
    text: 'The job does not start again by itself.',
    read: 'Correct the cause. The command shows the last lines of the failed rank. Then submit the job again.',
  },
  ended: { completed: 'The job is complete.', stopped: 'The job was stopped.' },
  takenOver: {
    brief: 'hand the job back',
    undone: (person: string, undone: string) =>
      `Nothing recovers this job: ${person} has taken it over, and ${undone}.`,
    ask: (person: string) =>
      `Ask ${person} who works on the job. Then hand the job back, so that Everstep recovers it.`,
    handBack: 'Hand the job back, so that Everstep decides again.',
    waits: (person: string) => `Automation is off: a failure waits for ${person}.`,
  },
  paused: {
    title: 'Paused by a person',
    brief: 'Resume the job to continue.',
    text: 'A person paused the job. It does not continue by itself.',
    resume: 'Resume the job.',
    keep: 'A paused job keeps its checkpoint in S3.',
    notStarted: 'The job has not started yet.',
  },
  stopping: 'All ranks stop at the next step that they agree on.',
  frozen: {
    brief: 'unfreeze the fleet',
    recovering: 'The fleet is frozen, and this recovery may need to end an instance.',
    training: 'The fleet is frozen: Everstep replaces no lost instance.',
    drift: (drift: string) => `Correct this in AWS: ${drift}`,
    see: 'See what the fleet lacks, and correct it. Then the fleet continues by itself.',
  },
  suspended: {
    brief: 'let the group launch instances',
    recovering: 'This recovery may need an instance, and the Auto Scaling group launches none.',
    waiting: 'The job waits for nodes, and the Auto Scaling group launches none.',
    training: 'The Auto Scaling group launches no instances: Everstep replaces no lost instance.',
    resume: 'Ask who suspended the launches of the Auto Scaling group. Then let it launch instances again.',
    command: (group: string) =>
      `aws autoscaling resume-processes --auto-scaling-group-name ${group} --scaling-processes Launch`,
  },
  shortage: {
    brief: (time: string) => `You need not act: Everstep tries again at ${time}.`,
    text: (type: string, zone: string) => `AWS has no ${type} capacity in ${zone}.`,
    none: 'AWS launched no instance.',
    type: 'instance', zone: 'this zone',
    attempt: (when: string, time: string) => `Everstep makes the next attempt ${when} (${time} UTC).`,
    said: (message: string) => `AWS reports: “${message}”`,
    free: (job: string) => `Pause the job ${job}, so that its nodes become free now.`,
    spare: 'Keep a spare node from now on, so that the next failure waits for no instance.',
  },
  late: {
    brief: 'find out what the recovery waits for',
    text: (limit: string, why: string) => `This phase has taken longer than ${limit}: ${why}.`,
    usual: (usual: string) => `it usually takes ${usual} after this kind of failure`,
    noUsual: 'no earlier incident of this kind shows how long it takes',
    fleet: 'Show the nodes that the fleet waits for, and the reason.',
    logs: 'Show the output of the ranks.',
    events: 'Show the decisions since the failure.',
  },
  recovering: 'Everstep recovers the job by itself.',
  stalled: {
    brief: 'find out why the ranks make no steps',
    text: 'The ranks run but make no steps.',
    logs: 'Read the logs of the ranks. Some scripts evaluate or load data for a long time.',
    stop: 'Stop the job if it hangs.',
  },
  slow: {
    brief: 'find out why training is slow',
    text: 'Training runs at less than half of its usual rate.',
    compare: 'Compare the step times of the nodes in the Metrics tab. One slow node slows down all others.',
  },
  queued: (limit?: string) =>
    `The job starts by itself when its turn comes.${limit === undefined ? '' : ` It stops waiting ${limit}.`}`,
  interrupted: 'The job continues from S3 by itself when it has nodes again.',
  returning: 'The job returns its nodes to another job. It continues by itself when it has nodes again.',
  pausing: 'All ranks stop at one step, which goes to S3. Then the job waits for a person to resume it.',
  unprotected: {
    brief: 'find out why memory protects no step',
    text: 'A failure now goes back to S3 or to the start.',
    see: 'Open the Protection tab. Each shard names the reason.',
  },
  weak: {
    degraded: 'Everstep makes the missing copies by itself. Open the Protection tab if this lasts.',
    unconfirmed: 'Some nodes are silent or report a fault. Everstep replaces them if this lasts.',
    oneCopy: 'The job keeps one copy of each shard, so a lost node costs steps.',
  },
  starting: 'The job starts by itself.',
  firstStep: 'The first step of a launch takes longer than later steps.',
  beforeCommit: 'A failure now returns to the step from which this launch began.',
  training: 'Everstep recovers the job by itself after a failure.',
} as const

/** Banners about a takeover of the job, its fleet, and other jobs. */
export const BANNERS = {
  takenOver: {
    title: 'Automation is off for this job',
    text: (person: string) => `${person} has taken it over. Everstep makes no decision until the job is handed back.`,
    person: 'A person',
  },
  frozen: { title: (fleet: string) => `Fleet ${fleet} is frozen`, text: 'Everstep ends no instance of it.' },
  suspended: { title: (fleet: string) => `Fleet ${fleet} launches no instances` },
  deleting: { title: 'The fleet is being deleted', text: 'Everstep ends its nodes one by one.' },
  wider: {
    title: 'More jobs failed',
    text: (jobs: string, names: string) => `${jobs} of this fleet failed in the same way at the same time: ${names}.`,
  },
} as const

/** The frame of the page, and its Overview tab. */
export const JOB = {
  crumb: 'Jobs',
  project: (name: string) => `project ${name}`,
  tabsLabel: 'Sections of this job',
  tabs: {
    overview: 'Overview', metrics: 'Metrics', logs: 'Logs', protection: 'Protection', checkpoints: 'Checkpoints',
    outputs: 'Outputs', events: 'Events', spec: 'Spec',
  },
  noTab: 'This job has no such section',
  strip: { label: 'Status of this job', step: 'Step', rate: 'Rate' },
  actions: {
    label: 'Actions for this job',
    takeOver: 'Take over', takeOverTitle: 'Everstep observes the job and makes no decision until you hand it back.',
    handBack: 'Hand back', handBackTitle: (person: string) => `Taken over by ${person}`,
    pause: 'Pause', pauseTitle: 'All ranks stop at one agreed step, which goes to S3. The nodes become free.',
    resume: 'Resume', resumeTitle: 'The job continues from its checkpoint when its turn in the queue comes.',
    stop: 'Stop', stopText: 'All ranks stop at one agreed step, which goes to S3. A stopped job never starts again.',
  },
  figures: {
    title: 'Figures', progress: 'Progress', rate: 'Rate', remaining: 'Time remaining', ettr: 'Useful time (ETTR)',
    ettrNote: 'training time ÷ time since the first start, without the queue',
    memory: 'Committed in memory', memoryNote: 'the newest step that memory can restore',
    checkpoint: 'Newest checkpoint',
    nodes: 'Healthy nodes', ranks: 'Nodes × ranks', incidents: 'Incidents', open: (number: string) => `${number} open`,
    incidentsNote: 'an incident may contain several failed launches',
    recomputed: 'Recomputed steps', recomputedNote: 'trained again after failures, not lost',
    unsaved: 'Lost steps', unsavedNote: 'made after the newest checkpoint',
    cost: 'Cost so far', noPrice: 'the fleet has no price', launches: 'Launches',
    fleet: 'Fleet', created: 'Created', runtime: (isOver: boolean) => (isOver ? 'Ran for' : 'Running for'),
    protection: 'Protection',
    step: (step: string) => `step ${step}`, none: 'none', of: (a: string, b: string) => `${a} of ${b}`,
    yes: 'yes', no: 'no', unknown: 'unknown',
  },
  remaining: {
    notDeclared: 'unknown: the script sets no target step',
    notYet: 'not known yet',
    paused: (time: string) => `${time} of training`,
    until: (time: string, end: string) => `${time}, until ${end} without failures`,
  },
  conditions: 'Current problems',
  whyFailed: 'Why it failed',
  incident: {
    open: 'Open incident', last: 'Latest incident', all: 'Incident details', log: 'Log at the failure',
  },
  acknowledge: 'Acknowledge', acknowledgedBy: (person: string) => `Acknowledged by ${person}`,
  incidents: 'All incidents of this job',
  timeTitle: 'Where the time went',
} as const

