/**
 * The first fold of a job: does it move, is it safe, what is being done, what is waited for, do I need to act?
 *
 * Pure: answers of the API and the time in, sentences out. What the API does not say is left out or said to be unknown; nothing is guessed.
 */
import type { DescribeProtectionResponse, Event, Fleet, Incident, TrainingJob } from '../contract'
import { ago, count, duration, headline, percent, plural, sentence, words } from './format'

/** good: all is well. busy: something is being done. warn: worth a look. bad: broken. idle: over, or not begun. */
export type Tone = 'good' | 'busy' | 'warn' | 'bad' | 'idle'

export interface Statement {
  tone: Tone
  /** A few words. */
  title: string
  /** A sentence or two. */
  text: string
}

export interface Act extends Statement {
  needed: boolean
  /** What to do, in order; empty where nothing is. */
  steps: string[]
}

export interface PhaseNow {
  incidentId: string
  phase: string
  cause: string
  elapsedSeconds: number
  /** How long this phase took in earlier incidents: the median, where there were any. */
  usualSeconds?: number
}

export interface Verdict {
  moving: Statement
  protection: Statement
  recovery?: Statement & PhaseNow
  waiting?: Statement
  act: Act
  banners: Statement[]
}

/** How a job's boundary moved while this browser looked: the API has no time of the last step, only of the last commit. */
export interface Progress {
  boundary: number
  /** Unix seconds. */
  movedAt?: number
  /** Steps per second lately, and normally. */
  rate?: number
  usualRate?: number
  /** Since when this browser has looked. */
  watchedSince: number
}

export interface Facts {
  job: Partial<TrainingJob> & Pick<TrainingJob, 'TrainingJobName'>
  protection?: Partial<DescribeProtectionResponse>
  incidents?: Incident[]
  fleet?: Partial<Fleet>
  events?: Event[]
  progress?: Progress
  /** Jobs other than this one with an open incident in the same fleet. */
  othersHit?: string[]
  /** Seconds since the server answered last. */
  staleSeconds?: number
  now: number
}

/** From this age on, a running job that makes no step is said to stand still; a step may take long, so a slow job gets ten of its own. */
const STILL_SECONDS = 60
/** The first step of a launch may take long: imports, compilation, the first batches. */
const FIRST_STEP_SECONDS = 600
const STILL_STEPS = 10
export const STALE_SECONDS = 15
/** A recovery that has taken this many times as long as usual is worth a look. */
const LATE_FACTOR = 3
const LATE_SECONDS = 300
const ENDED = new Set(['Completed', 'Failed', 'Stopped'])
const PHASE_WORDS: Record<string, string> = {
  detect: 'finding out what failed',
  replace: 'getting nodes ready',
  restore: 'restoring state',
  rework: 'redoing lost steps',
}
const CAUSES: Record<string, string> = {
  load_failed: 'a shard could not be loaded',
  rank_exit: 'a training process ended',
  agent_lost: 'an agent lost its memory of the job',
  node_unreachable: 'a node cannot be reached',
  node_fault: 'a node reported a fault',
  instance_terminated: 'an instance was terminated',
  group_lost: 'all nodes that held a shard were lost',
}

export const isOver = (job: { TrainingJobStatus?: string }): boolean => ENDED.has(job.TrainingJobStatus ?? '')
export const causeWords = (cause: string): string => CAUSES[cause] ?? words(cause)
export const phaseWords = (phase: string): string => PHASE_WORDS[phase] ?? words(phase)

/** The incident that is not closed, if any; the newest of them. */
export const openIncident = (incidents: Incident[] = []): Incident | undefined => incidents.filter((each) => each.ClosedAt === undefined).at(-1)

export function verdict(facts: Facts): Verdict {
  const recovery = recoveryOf(facts)
  const moving = movingOf(facts, recovery !== undefined)
  const waiting = waitingOf(facts)
  const protection = protectionOf(facts)
  return { moving, protection, recovery, waiting, act: actOf(facts, moving, recovery, protection), banners: bannersOf(facts) }
}

function movingOf({ job, protection, progress, now }: Facts, isRecovering: boolean): Statement {
  const step = job.Boundary ?? -1
  const at = step >= 0 ? `Step ${count(step)}` : 'No step yet'
  const highest = Math.max(job.MaxBoundary ?? -1, step)
  switch (job.TrainingJobStatus) {
    case 'Completed':
      return { tone: 'good', title: 'Finished', text: `${highest >= 0 ? `${plural(highest, 'step')} done. ` : ''}${sentence(job.Reason ?? '')}` }
    case 'Failed':
      return { tone: 'bad', title: 'Failed', text: `${highest > 0 ? `It got to step ${count(highest)}. ` : ''}${headline(job.FailureReason ?? job.Reason ?? '')}` }
    case 'Stopped':
      return { tone: 'idle', title: 'Stopped', text: `${highest >= 0 ? `It got to step ${count(highest)}. ` : ''}${sentence(job.Reason ?? '')}` }
    case 'Stopping':
      return { tone: 'busy', title: 'Stopping', text: `${at}. ${sentence(job.Reason ?? '')}` }
  }
  if (isBeforeFirstStep(job)) {
    const since = job.SecondaryStatusTransitions?.at(-1)?.StartTime
    const age = since === undefined ? undefined : now - since
    const title = age !== undefined && age > FIRST_STEP_SECONDS ? 'Standing still' : isRecovering ? 'Not moving, recovering' : 'Starting'
    const reached = highest > step ? ` It had reached step ${count(highest)}.` : ''
    const wait = age === undefined ? '' : ` for ${duration(age)}`
    return { tone: title === 'Standing still' ? 'warn' : 'busy', title, text: `The ranks run${wait}, but have made no step since they were started.${reached}` }
  }
  if (job.SecondaryStatus === 'Training') {
    const moved = newest(progress?.movedAt, protection?.CommittedAt)
    const age = moved === undefined ? undefined : now - moved
    const watched = progress === undefined ? 0 : now - progress.watchedSince
    const limit = Math.max(STILL_SECONDS, progress?.usualRate ? STILL_STEPS / progress.usualRate : 0)
    if ((age ?? watched) > limit) {
      const since = age === undefined ? `no step since this page was opened ${ago(progress!.watchedSince, now)}` : `the last step was ${ago(Math.min(moved!, now), now)}`
      return { tone: 'warn', title: 'Standing still', text: `${at}: the ranks run, but ${since}.` }
    }
    const rate = progress?.rate
    const usual = progress?.usualRate
    const pace = rate ? `${rateWords(rate)}${comparison(rate, usual)}` : usual ? `${rateWords(usual)} on average` : ''
    const last = moved === undefined ? '' : `, ${ago(Math.min(moved, now), now)}`
    const text = `${at}${last}${pace ? `; ${pace}` : ''}.${isRecovering ? ` Redoing steps up to ${count(highest)}.` : ''}`
    return { tone: isRecovering ? 'busy' : 'good', title: isRecovering ? 'Moving, catching up' : 'Moving', text }
  }
  if (job.SecondaryStatus === 'Pending') return { tone: 'idle', title: 'Queued', text: sentence(job.Reason ?? 'It waits for its turn') }
  if (job.SecondaryStatus === undefined) return { tone: 'idle', title: 'Unknown', text: 'The control plane has not said where this job stands.' }
  if (isRecovering || job.SecondaryStatus === 'Restarting') {
    return { tone: 'busy', title: 'Not moving, recovering', text: highest >= 0 ? `It had reached step ${count(highest)}.` : 'It had not made a step yet.' }
  }
  return { tone: 'busy', title: 'Starting', text: `${at}. ${sentence(job.Reason ?? '')}` }
}

/** The ranks of this launch run, but have not gone beyond what they were started from. */
function isBeforeFirstStep(job: Partial<TrainingJob>): boolean {
  return job.SecondaryStatus === 'Training' && job.TrainingJobStatus === 'InProgress' && (job.Boundary ?? -1) <= (job.BaseStep ?? -1)
}

function newest(...moments: (number | undefined)[]): number | undefined {
  const known = moments.filter((at): at is number => at !== undefined)
  return known.length ? Math.max(...known) : undefined
}

/** Steps per second over everything that counted so far; undefined while that says little. */
export function usualRate(job: Partial<TrainingJob>): number | undefined {
  const seconds = job.AccountingSeconds?.['train'] ?? 0
  const steps = job.MaxBoundary ?? -1
  return seconds >= 30 && steps >= 10 ? steps / seconds : undefined
}

export function rateWords(perSecond: number): string {
  return perSecond >= 1 ? `${perSecond.toFixed(1)} steps/s` : `${duration(1 / perSecond)} a step`
}

function comparison(rate: number, usual?: number): string {
  if (!usual) return ''
  const ratio = rate / usual
  if (ratio > 0.8 && ratio < 1.25) return ', as usual'
  return ratio < 1 ? `, ${percent(ratio)} of its usual rate` : `, ${ratio.toFixed(1)} times its usual rate`
}

function protectionOf({ job, protection }: Facts): Statement {
  if (protection === undefined) return { tone: 'idle', title: 'Protection unknown', text: 'Not heard from the control plane yet.' }
  const checkpoint = protection.LastCheckpoint
  const durable = checkpoint ? `step ${count(checkpoint.Step)} is in S3` : 'nothing is in S3'
  if (isOver(job)) return { tone: 'idle', title: 'Memory released', text: sentence(`the job is over; ${durable}`) }
  const step = protection.CommittedStep ?? -1
  const odds = protection.RecoveryOdds ?? []
  if (step < 0) {
    return { tone: checkpoint ? 'warn' : 'idle', title: 'Nothing in memory yet', text: sentence(`no step has been committed in memory; ${durable}`) }
  }
  const copies = fewestCopies(protection)
  const held = copies === undefined ? `step ${count(step)} was committed` : `step ${count(step)} on ${plural(copies, 'node')} each`
  const losses = odds.map((each) => `${lossWords(each.LostNodes)}: ${each.Probability >= 1 ? 'survived from memory' : each.Probability <= 0 ? `back to ${checkpoint ? 'S3' : 'the start'}` : `survived from memory in ${percent(each.Probability)} of the cases`}`)
  const chance = losses.length ? losses.join('; ') : 'what a loss would do cannot be counted until every rank has committed'
  const single = odds.find((each) => each.LostNodes === 1)?.Probability ?? 1
  const state = protection.ProtectionState ?? 'Degraded'
  const tone: Tone = state === 'Protected' ? (single >= 1 ? 'good' : 'warn') : state === 'Degraded' ? 'warn' : 'bad'
  return {
    tone,
    title: state,
    text: `${sentence(`${held}; ${chance}`)} ${sentence(durable)}${state === 'Protected' ? '' : ` ${sentence(protection.Reason ?? '')}`}`.trim(),
  }
}

function fewestCopies(protection: Partial<DescribeProtectionResponse>): number | undefined {
  const counts = (protection.Shards ?? []).map((shard) => (shard.Holders ?? []).filter((holder) => holder.InView).length)
  return counts.length ? Math.min(...counts) : undefined
}

function lossWords(nodes: number): string {
  return nodes === 1 ? 'any single loss' : nodes === 2 ? 'any two' : nodes === 3 ? 'any three' : `any ${nodes}`
}

/** How long each phase of an incident took, or has taken up to `now`; a phase that has not begun is absent. */
export function phaseLengths(incident: Incident, now: number): { phase: string; seconds: number; isOpen: boolean }[] {
  const order = ['detect', 'replace', 'restore', 'rework'] as const
  const open = incident.ClosedAt === undefined ? Math.max(0, order.findIndex((phase) => phase === incident.Phase)) : undefined
  const seconds = [incident.DetectSeconds, incident.ReplaceSeconds, incident.RestoreSeconds, incident.ReworkSeconds]
  const known = [seconds[0] ?? Math.max(0, incident.OpenedAt - incident.FailedAt), ...seconds.slice(1)]
  const lengths: { phase: string; seconds: number; isOpen: boolean }[] = []
  let spent = 0
  for (const [index, phase] of order.entries()) {
    if (open !== undefined && index > open) break
    const isOpen = index === open
    const length = isOpen ? Math.max(0, now - incident.FailedAt - spent) : (known[index] ?? 0)
    lengths.push({ phase, seconds: length, isOpen })
    spent += length
  }
  return lengths
}

function recoveryOf({ incidents = [], now }: Facts): (Statement & PhaseNow) | undefined {
  const incident = openIncident(incidents)
  if (incident === undefined) return undefined
  const current = phaseLengths(incident, now).at(-1)!
  const earlier = incidents
    .filter((each) => each.ClosedAt !== undefined)
    .map((each) => phaseLengths(each, now).find((length) => length.phase === current.phase)?.seconds)
    .filter((seconds): seconds is number => seconds !== undefined)
    .sort((a, b) => a - b)
  const usualSeconds = earlier.length ? earlier[Math.floor((earlier.length - 1) / 2)] : undefined
  const isLate = current.seconds > (usualSeconds === undefined ? LATE_SECONDS : Math.max(30, LATE_FACTOR * usualSeconds))
  const against = usualSeconds === undefined ? 'no earlier incident of this job to compare with' : `usually ${duration(usualSeconds)}`
  const lost = incident.LostSteps === undefined ? '' : incident.LostSteps === 0 ? ' No step was lost.' : ` ${plural(incident.LostSteps, 'step')} to be done again.`
  return {
    tone: isLate ? 'warn' : 'busy',
    title: sentence(phaseWords(incident.Phase)).slice(0, -1),
    text: `${sentence(causeWords(incident.Cause))} ${sentence(incident.Decision)} This phase has taken ${duration(current.seconds)} (${against}).${lost}`,
    incidentId: incident.IncidentId,
    phase: incident.Phase,
    cause: incident.Cause,
    elapsedSeconds: current.seconds,
    usualSeconds,
  }
}

function waitingOf({ job, fleet }: Facts): Statement | undefined {
  if (isOver(job) || job.SecondaryStatus === 'Training') return undefined
  const parts = [job.Reason, fleet?.FleetStatus === 'active' ? undefined : fleet?.Reason].filter((part): part is string => Boolean(part))
  if (!parts.length) return undefined
  const [first = '', ...rest] = [...new Set(parts)].map(sentence)
  const colon = first.indexOf(': ')
  const isShort = colon > 0 && colon < 80 // “waits for 1 node: what AWS says”
  return { tone: 'busy', title: isShort ? first.slice(0, colon) : 'Waiting', text: [isShort ? sentence(first.slice(colon + 2)) : first, ...rest].join(' ') }
}

function actOf(facts: Facts, moving: Statement, recovery: (Statement & PhaseNow) | undefined, protection: Statement): Act {
  const { job, fleet, staleSeconds = 0, progress } = facts
  const name = job.TrainingJobName
  const yes = (tone: Tone, text: string, steps: string[]): Act => ({ needed: true, tone, title: 'Yes', text, steps })
  const no = (text: string, tone: Tone = 'good'): Act => ({ needed: false, tone, title: 'No', text, steps: [] })
  if (staleSeconds > STALE_SECONDS) {
    return yes('warn', `This page has heard nothing for ${duration(staleSeconds)}, so what it shows may be over.`, [
      'Check that the control plane runs: everstep server answers at /v1/health.',
      'Training goes on without the control plane, but a failure now waits for it.',
    ])
  }
  switch (job.TrainingJobStatus) {
    case 'Completed':
      return no('The job is done.')
    case 'Stopped':
      return no('The job was stopped.', 'idle')
    case 'Stopping':
      return no('It stops by itself at the next step that all ranks agree on.', 'busy')
    case 'Failed':
      return yes('bad', 'The job has failed and will not start again by itself.', [
        'Read why under “Is it moving?”, and the last lines of the failing rank under Logs.',
        `Mend the cause, then submit it again under another name; ${facts.protection?.LastCheckpoint ? `its newest checkpoint, step ${count(facts.protection.LastCheckpoint.Step)}, is under Checkpoints.` : 'it has no checkpoint in S3.'}`,
      ])
  }
  if (fleet?.FleetStatus === 'frozen') {
    const steps = (fleet.Drift ?? []).map((drift) => `Put right in AWS: ${drift}`)
    const cannot = recovery ? 'This recovery may need an instance ended, and the fleet is frozen.' : 'The fleet is frozen: a lost instance would not be replaced.'
    return yes(recovery ? 'bad' : 'warn', `${cannot} ${sentence(fleet.Reason ?? '')}`.trim(), steps.length ? steps : ['See the fleet: it says what it misses, and goes on by itself once it is there.'])
  }
  if (recovery && recovery.tone === 'warn') {
    return yes('warn', `The recovery takes longer than ${recovery.usualSeconds === undefined ? duration(LATE_SECONDS) : `${LATE_FACTOR} times the usual ${duration(recovery.usualSeconds)}`}.`, [
      'See what is waited for, above.',
      recovery.phase === 'replace' ? 'If it waits for instances: AWS may lack capacity. See the fleet, and its spares.' : 'Look at the logs of the ranks and at the events of this incident.',
    ])
  }
  if (recovery && /capacity/i.test(job.Reason ?? '')) {
    return no('AWS has no instance to give; Everstep asks again by itself. If you cannot wait: stop a job that matters less, or give the fleet more spares for the next time.', 'busy')
  }
  if (recovery) return no('Everstep is recovering the job; it needs nobody.', 'busy')
  if (moving.title === 'Standing still') {
    return yes('warn', 'The ranks run but make no steps.', [
      'Look at the ranks’ logs: a long evaluation or data loading is normal for some scripts.',
      `If it hangs, stop it with: everstep jobs stop ${name}`,
    ])
  }
  if (progress?.rate && progress.usualRate && progress.rate < 0.5 * progress.usualRate && job.SecondaryStatus === 'Training') {
    return yes('warn', 'Training is at less than half of its usual rate.', ['Compare step times under Metrics; one slow node slows down all.'])
  }
  if (job.SecondaryStatus === 'Pending') {
    const max = job.StoppingCondition?.MaxPendingTimeInSeconds
    const limit = max && job.CreationTime ? ` It gives up ${ago(job.CreationTime + max, facts.now)}.` : ''
    return no(`It starts by itself when it is its turn.${limit}`, 'idle')
  }
  if (protection.tone === 'bad' && job.SecondaryStatus === 'Training' && (job.Boundary ?? -1) > 3) {
    return yes('warn', 'It trains, but no step is kept in memory: a failure now goes back to S3 or to the start.', ['See Protection: each shard says why it has no copies.'])
  }
  if (protection.tone === 'warn' && job.SecondaryStatus === 'Training') {
    return no('Fewer copies than asked for; Everstep makes them again by itself. Look at Protection if this lasts.', 'warn')
  }
  if (job.SecondaryStatus !== 'Training') return no('It is on its way.', 'busy')
  if (isBeforeFirstStep(job)) return no('The first step of a launch takes longer than others.', 'busy')
  if (protection.tone === 'idle') return no('It trains. No step is kept in memory yet: a failure now would go back to where this launch began.', 'idle')
  return no('It trains, and a failure would be recovered from.')
}

function bannersOf({ job, fleet, othersHit = [], staleSeconds = 0 }: Facts): Statement[] {
  const banners: Statement[] = []
  if (staleSeconds > STALE_SECONDS) {
    banners.push({ tone: 'bad', title: 'No news', text: `The control plane has not answered for ${duration(staleSeconds)}. What you see is old.` })
  }
  if (job.TakenOverTime !== undefined) {
    banners.push({ tone: 'warn', title: 'Automation is off for this job', text: `${job.TakenOverBy ?? 'A person'} has taken it over: Everstep observes it and decides nothing until it is handed back.` })
  }
  if (fleet?.FleetStatus === 'frozen') {
    const drift = (fleet.Drift ?? []).map(sentence).join(' ')
    banners.push({ tone: 'warn', title: `Fleet ${fleet.FleetName ?? ''} is frozen`.trim(), text: `Nothing is ended in it until this passes. ${sentence(fleet.Reason ?? '')} ${drift}`.trim() })
  }
  if (fleet?.FleetStatus === 'deleting') banners.push({ tone: 'warn', title: 'The fleet is being deleted', text: 'Its nodes are ended one by one.' })
  if (othersHit.length) {
    banners.push({ tone: 'warn', title: 'Wider than this job', text: `${plural(othersHit.length, 'other job')} of this fleet ${othersHit.length === 1 ? 'has' : 'have'} an open incident, too: ${othersHit.slice(0, 5).join(', ')}.` })
  }
  return banners
}
