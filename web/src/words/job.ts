/** Every text of the job page: its verdict, what to do, and the tabs. Causes and phases are in `causes.ts`. */

import { plural } from '../model/format'

/** The state of the job: short titles, and the first sentences of the verdict. */
export const STATE = {
  titles: {
    completed: 'Completed',
    failed: 'Failed',
    stopped: 'Stopped',
    stopping: 'Stopping',
    stalled: 'Stalled',
    recovering: 'Recovering',
    recomputing: 'Recomputing steps',
    starting: 'Starting',
    training: 'Training',
    paused: 'Paused',
    pausing: 'Pausing',
    interrupted: 'Interrupted',
    returning: 'Returning nodes',
    queued: 'Queued',
    notRecovering: 'Not recovering',
    unknown: 'Unknown',
  },
  atStep: (title: string, step?: string) => (step === undefined ? `${title}.` : `${title} at step ${step}.`),
  completed: (steps?: string, target?: string) =>
    steps === undefined ? 'Completed.' : `Completed after ${steps}${target === undefined ? '' : ` of ${target}`}.`,
  training: (step: string | undefined, nodes: string, pace: string) =>
    `Training ${step === undefined ? 'before the first step' : `at step ${step}`}${nodes}${pace}.`,
  onNodes: (nodes: string) => ` on ${nodes}`,
  slower: (share: string) => `, at ${share} of the usual rate`,
  faster: (factor: string) => `, at ${factor} times the usual rate`,
  grows: 'The job grows again when capacity returns.',
  recomputing: (step: string, reached: string) => `Recomputing steps: at step ${step} of ${reached}.`,
  stalled: (step: string, last: string) => `Stalled at step ${step}: the last step was ${last}.`,
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
  rate: { perSecond: (steps: string) => `${steps} steps/s`, perStep: (time: string) => `${time} per step` },
} as const

/** Sentences about the steps that are safe in memory and in S3. */
export const KEPT = {
  unknown: 'Protection is unknown.',
  survives: (nodes: number) =>
    `Any ${nodes === 1 ? 'one node' : `${nodes} nodes`} can fail without the loss of a step.`,
  noLoss: 'The loss of one node loses the steps since the newest checkpoint in S3.',
  degraded: (reason: string) => `Degraded. ${reason}`,
  tooFewCopies: 'some shards have too few copies',
  unprotected: 'Unprotected: memory holds no committed step.',
  unprotectedStep: (reason: string) => `Unprotected. ${reason}`,
  notYet: 'Not yet protected: memory holds no committed step.',
  unconfirmed: (healthy: string, wanted: string) =>
    `Protection is unconfirmed: ${healthy} of ${wanted} nodes are healthy.`,
  checkpoint: (step: string) => `The checkpoint of step ${step} is in S3.`,
  noCheckpoint: 'No checkpoint is in S3.',
  noStep: 'No step was lost: the job had made none.',
  lostNothing: (step: string) => `No step was lost: step ${step} is in S3.`,
  lostSome: (lost: number, step: string) =>
    `${plural(lost, 'step')} after the checkpoint of step ${step} ${lost === 1 ? 'is' : 'are'} lost.`,
  lostAll: (lost: number) => `${plural(lost, 'step')} ${lost === 1 ? 'is' : 'are'} lost: no checkpoint is in S3.`,
} as const

/** The line about the rehearsals of a job's resume. */
export const RESUME = {
  label: 'Resume',
  pending: 'A rehearsal is pending.',
  again: 'A further rehearsal is pending.',
  of: {
    Proven: (step: string, time: string) => `Resume proven at step ${step}, in ${time}.`,
    Differs: (step: string, _: string, rank?: number) => `Rank ${rank} differs after a restart from step ${step}.`,
    Unproven: (step: string, _: string, rank?: number) =>
      `Rank ${rank} repeats its steps after a restart from step ${step}, and loses values of the script.`,
    Unstable: (step: string, _: string, rank?: number) =>
      `Rank ${rank} is not deterministic after a restart from step ${step}.`,
    Refused: (step: string, _: string, rank?: number) =>
      rank === undefined
        ? `The job has rehearsed no restart until step ${step}.`
        : `Rank ${rank} could not rehearse a restart from step ${step}.`,
  },
} as const

/** Banners about a takeover of the job, its fleet, and other jobs. */
export const BANNERS = {
  takenOver: {
    title: 'Automation is off for this job',
    text: (person: string) => `${person} has taken it over. Everstep makes no decision until the job is handed back.`,
    person: 'A person',
  },
  fleet: (fleet: string) => `Fleet ${fleet} needs a person`,
  trash: {
    title: 'The job is in the trash',
    text: (moment: string) => `Everstep deletes it and its objects in S3 after ${moment}.`,
  },
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
    overview: 'Overview',
    metrics: 'Metrics',
    logs: 'Logs',
    protection: 'Protection',
    checkpoints: 'Checkpoints',
    outputs: 'Outputs',
    events: 'Events',
    spec: 'Spec',
  },
  noTab: 'This job has no such section',
  strip: { label: 'Status of this job', step: 'Step', rate: 'Rate' },
  actions: {
    label: 'Actions for this job',
    takeOver: 'Take over',
    takeOverTitle: 'Everstep observes the job and makes no decision until you hand it back.',
    handBack: 'Hand back',
    handBackTitle: (person: string) => `Taken over by ${person}`,
    pause: 'Pause',
    pauseTitle: 'All ranks stop at one agreed step, which goes to S3. The nodes become free.',
    resume: 'Resume',
    resumeTitle: 'The job continues from its checkpoint when its turn in the queue comes.',
    undelete: 'Undelete',
    undeleteTitle: 'The job leaves the trash with all of its checkpoints.',
    stop: 'Stop',
    stopText: 'All ranks stop at one agreed step, which goes to S3. A stopped job never starts again.',
  },
  figures: {
    title: 'Figures',
    progress: 'Progress',
    rate: 'Rate',
    remaining: 'Time remaining',
    ettr: 'Useful time (ETTR)',
    ettrNote: 'training time ÷ time since the first start, without the queue',
    memory: 'Committed in memory',
    memoryNote: 'the newest step that memory can restore',
    checkpoint: 'Newest checkpoint',
    nodes: 'Healthy nodes',
    ranks: 'Nodes × ranks',
    incidents: 'Incidents',
    open: (number: string) => `${number} open`,
    incidentsNote: 'an incident may contain several failed launches',
    recomputed: 'Recomputed steps',
    recomputedNote: 'trained again after failures, not lost',
    unsaved: 'Lost steps',
    unsavedNote: 'made after the newest checkpoint',
    cost: 'Cost so far',
    noPrice: 'the fleet has no price',
    launches: 'Launches',
    fleet: 'Fleet',
    created: 'Created',
    runtime: (isOver: boolean) => (isOver ? 'Ran for' : 'Running for'),
    protection: 'Protection',
    step: (step: string) => `step ${step}`,
    none: 'none',
    of: (a: string, b: string) => `${a} of ${b}`,
    yes: 'yes',
    no: 'no',
    unknown: 'unknown',
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
    open: 'Open incident',
    last: 'Latest incident',
    all: 'Incident details',
    log: 'Log at the failure',
  },
  incidents: 'All incidents of this job',
  timeTitle: 'Where the time went',
} as const
