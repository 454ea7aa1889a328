/**
 * The first fold of a job: does it move, is it safe, what is being done, what is waited for, do I need to act?
 *
 * Pure: answers of the API and the time in, sentences out. What the API does not say is left out or said to be unknown; nothing is guessed.
 */
import type { DescribeProtectionResponse, Fleet, Incident, TrainingJob } from '../contract'
import { actOf, isLaunchSuspended, LATE_FACTOR, LATE_SECONDS, LEAST_LATE_SECONDS, type Act } from './act'
import { CAUSES } from '../words/causes'
import type { Facts, PhaseNow, Progress, Statement } from './facts'
import { jobFigures, phaseLengths, shown, STALE_SECONDS, type JobFigures } from './figures'
import { ago, count, duration, headline, nearest, percent, plural, sentence, words } from './format'
import { hasLetGo, isOver, leftInS3, leftUndone, reachedStep, stateOf, type Tone } from './standing'

export { isOver, STALE_SECONDS }
export type { Act, Facts, PhaseNow, Progress, Statement, Tone }

export interface Verdict {
  figures: JobFigures
  moving: Statement
  protection: Statement
  recovery?: Statement & PhaseNow
  waiting?: Statement
  act: Act
  banners: Statement[]
}

/** From this age on, a running job that makes no step is said to stand still; a step may take long, so a slow job gets ten of its own. */
const STILL_SECONDS = 60
/** The first step of a launch may take long: imports, compilation, the first batches. */
const FIRST_STEP_SECONDS = 600
const STILL_STEPS = 10
const PHASE_WORDS: Record<string, string> = {
  detect: 'finding out what failed',
  replace: 'getting nodes ready',
  restore: 'restoring state',
  rework: 'redoing lost steps',
} satisfies Partial<Record<Incident['Phase'] | 'detect', string>>
/** What happened, as a clause. Instance ids never begin these words. */
export const causeWords = (cause: string): string => {
  const said: string = (CAUSES as Readonly<Record<string, string>>)[cause] ?? words(cause)
  return said.startsWith('AWS') ? said : said.charAt(0).toLowerCase() + said.slice(1)
}
export const phaseWords = (phase: string): string => PHASE_WORDS[phase] ?? words(phase)

/** The incident that is not closed, if any; the newest of them. */
export const openIncident = (incidents: Incident[] = []): Incident | undefined => incidents.filter((each) => each.ClosedAt === undefined).at(-1)

export function verdict(facts: Facts): Verdict {
  const figures = jobFigures(facts.job, facts)
  const recovery = recoveryOf(facts)
  const moving = aged(movingOf(facts, recovery !== undefined), facts)
  const waiting = waitingOf(facts)
  const protection = aged(protectionOf(facts, figures), facts)
  const said = reasonWords(facts.job.Reason ?? '', facts.now, facts.fleet)
  const act = actOf(facts, { moving, protection, recovery, isBeforeFirstStep: isBeforeFirstStep(facts.job), shortage: said.isShort ? said.text.split(' AWS says:')[0] : undefined })
  return { figures, moving, protection, recovery, waiting, act, banners: bannersOf(facts) }
}

/** A statement about the present, from an answer that is too old for it: grey, and in the past tense. */
function aged(said: Statement, { job, staleSeconds = 0 }: Facts): Statement {
  if (staleSeconds <= STALE_SECONDS) return said
  if (isOver(job)) return said.tone === 'good' ? { ...said, tone: 'idle' } : said // the end of a job stays true
  const text = `Last known ${duration(staleSeconds)} ago: ${said.title}. ${said.text}`
  return { tone: 'idle', title: 'Unknown', text }
}

function movingOf({ job, protection, progress, now }: Facts, isRecovering: boolean): Statement {
  const step = job.Boundary ?? -1
  const at = step >= 0 ? `Step ${count(step)}` : 'No step yet'
  const highest = reachedStep(job)
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
      return { tone: 'warn', title: 'Standing still', text: `${at}: the ranks run, but ${since}. ${sentence(job.Reason ?? '')}`.trim() }
    }
    const rate = progress?.rate
    const usual = progress?.usualRate
    const pace = rate ? `${rateWords(rate)}${comparison(rate, usual)}` : usual ? `${rateWords(usual)} on average` : ''
    const last = moved === undefined ? '' : `, ${ago(Math.min(moved, now), now)}`
    const size = smallerSize(job)
    const text = `${at}${last}${pace ? `; ${pace}` : ''}.${isRecovering ? ` Redoing steps up to ${count(highest)}.` : ''}${size ? ' It grows back when capacity returns.' : ''}`
    return { tone: isRecovering ? 'busy' : size ? 'warn' : 'good', title: isRecovering ? 'Moving, catching up' : size ? `Moving on ${size}` : 'Moving', text }
  }
  const reached = highest >= 0 ? `It had reached step ${count(highest)}. ` : ''
  if (job.SecondaryStatus === 'Paused') return { tone: 'idle', title: 'Paused', text: `${reached}${sentence(job.Reason ?? '')}` }
  if (job.SecondaryStatus === 'Pausing' && !isRecovering) return { tone: 'busy', title: 'Pausing', text: `${at}. ${sentence(job.Reason ?? '')}` }
  if (job.SecondaryStatus === 'Interrupted' && !isRecovering) {
    return { tone: 'warn', title: hasLetGo(job) ? 'Interrupted, without nodes' : 'Giving its nodes back', text: `${reached}${sentence(job.Reason ?? '')}` }
  }
  if (job.SecondaryStatus === 'Pending') return { tone: 'idle', title: 'Queued', text: sentence(job.Reason ?? 'It waits for its turn') }
  if (job.SecondaryStatus === undefined) return { tone: 'idle', title: 'Unknown', text: 'The control plane has not said where this job stands.' }
  if (isRecovering || job.SecondaryStatus === 'Restarting') {
    if (leftUndone(job)) return { tone: 'bad', title: 'Not moving', text: `${reached || 'It had not made a step yet. '}Nobody recovers it: it was taken over.` }
    return { tone: 'busy', title: 'Not moving, recovering', text: highest >= 0 ? `It had reached step ${count(highest)}.` : 'It had not made a step yet.' }
  }
  return { tone: 'busy', title: 'Starting', text: `${at}. ${sentence(job.Reason ?? '')}` }
}

/** The number of nodes of a launch that has fewer than the job asked for; empty for any other launch. */
function smallerSize({ GenerationNodeCount: now, NodeCount: asked }: Partial<TrainingJob>): string {
  return now !== undefined && asked !== undefined && now < asked ? `${now} of ${plural(asked, 'node')}` : ''
}

/** The ranks of this launch run, but have not gone beyond what they were started from. */
function isBeforeFirstStep(job: Partial<TrainingJob>): boolean {
  const areRanksThere = job.SecondaryStatus === 'Training' || (['Starting', 'Restarting'].includes(job.SecondaryStatus ?? '') && stateOf(job) === 'running')
  return areRanksThere && job.TrainingJobStatus === 'InProgress' && (job.Boundary ?? -1) <= (job.BaseStep ?? -1)
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

function protectionOf({ job, protection }: Facts, figures: JobFigures): Statement {
  if (protection === undefined) return { tone: 'idle', title: 'Protection unknown', text: 'Not heard from the control plane yet.' }
  const checkpoint = protection.LastCheckpoint
  const durable = checkpoint ? `step ${count(checkpoint.Step)} is in S3` : 'nothing is in S3'
  if (job.TrainingJobStatus === 'Failed' && reachedStep(job) > 0) {
    const { tone, text } = leftInS3(job, protection)!
    const title = tone === 'good' ? 'Kept in S3' : checkpoint ? `Only step ${count(checkpoint.Step)}, in S3` : 'No: nothing is kept'
    return { tone: tone === 'good' ? 'idle' : checkpoint ? 'warn' : 'bad', title, text: `${text} Its nodes’ memory is released.` }
  }
  if (isOver(job)) return { tone: 'idle', title: 'Memory released', text: sentence(`the job is over; ${durable}`) }
  if (hasLetGo(job)) return { tone: checkpoint ? 'idle' : 'warn', title: checkpoint ? 'Kept in S3' : 'Nothing is kept', text: sentence(`it has no nodes, so nothing is in memory; ${durable}`) }
  const step = figures.committedStep
  const odds = protection.RecoveryOdds ?? []
  if (step === undefined) {
    const text = sentence(`no step has been committed in memory; ${durable}`)
    return { tone: figures.protectionTone, title: figures.protection, text }
  }
  const copies = fewestCopies(protection)
  const held = copies === undefined || protection.ParityGroupSize !== undefined ? `step ${count(step)} was committed` : `step ${count(step)} on ${plural(copies, 'node')} each`
  const parity = protection.ParityGroupSize === undefined ? '' : `, with parity over groups of ${protection.ParityGroupSize} nodes`
  const losses = odds.map((each) => `${lossWords(each.LostNodes)}: ${each.Probability >= 1 ? 'survived from memory' : each.Probability <= 0 ? `back to ${checkpoint ? 'S3' : 'the start'}` : `survived from memory in ${percent(each.Probability)} of the cases`}`)
  const chance = losses.length ? losses.join('; ') : 'what a loss would do cannot be counted until every rank has committed'
  const state = figures.protection
  if (state === 'Unconfirmed') {
    const heard = `${shown(figures, 'healthyNodes')} of ${shown(figures, 'wantedNodes')} nodes are connected and healthy`
    const text = `${sentence(`step ${count(step)} was committed, but only ${heard}`)} ${sentence(durable)}`
    return { tone: figures.protectionTone, title: state, text }
  }
  return {
    tone: figures.protectionTone,
    title: state,
    text: `${sentence(`${held}${parity}; ${chance}`)} ${sentence(durable)}${state === 'Protected' ? '' : ` ${sentence(protection.Reason ?? '')}`}`.trim(),
  }
}

function fewestCopies(protection: Partial<DescribeProtectionResponse>): number | undefined {
  const counts = (protection.Shards ?? []).map((shard) => (shard.Holders ?? []).filter((holder) => holder.InView).length)
  return counts.length ? Math.min(...counts) : undefined
}

function lossWords(nodes: number): string {
  return nodes === 1 ? 'any single loss' : nodes === 2 ? 'any two' : nodes === 3 ? 'any three' : `any ${nodes}`
}

function recoveryOf({ incidents = [], now }: Facts): (Statement & PhaseNow) | undefined {
  const incident = openIncident(incidents)
  if (incident === undefined) return undefined
  const current = phaseLengths(incident, now).at(-1)!
  const earlier = incidents
    .filter((each) => each.ClosedAt !== undefined && each.Cause === incident.Cause)
    .map((each) => phaseLengths(each, now).find((length) => length.phase === current.phase)?.seconds)
    .filter((seconds): seconds is number => seconds !== undefined)
    .sort((a, b) => a - b)
  const usualSeconds = earlier.length ? earlier[Math.floor((earlier.length - 1) / 2)] : undefined
  const lateAfterSeconds = usualSeconds === undefined ? LATE_SECONDS : Math.max(LEAST_LATE_SECONDS, LATE_FACTOR * usualSeconds)
  const isLate = current.seconds > lateAfterSeconds
  const against = usualSeconds === undefined ? 'no earlier incident of this kind to compare with' : `usually ${duration(usualSeconds)} after this kind of failure`
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
    lateAfterSeconds,
  }
}

/** What `waiting_words` (control_plane/core/capacity.py) puts between what AWS said and when it is asked again, and what stands before both in a job's reason. */
const ASKED_AGAIN = /^(?:([^:]{1,80}): )?(.*)(; Everstep retries at )(\d\d:\d\d:\d\d) UTC\.?$/s

/** A job's reason as it is told: of what AWS does not give, what that means, when it is asked again, and what AWS says, in its words. */
export function reasonWords(reason: string, now: number, fleet?: Partial<Fleet>): { title?: string; text: string; isShort?: boolean } {
  const [, waits, said = '', , time] = ASKED_AGAIN.exec(reason) ?? []
  if (time === undefined) return { text: sentence(reason) }
  const at = nearest(time, now)
  const isShort = /sufficient .*capacity|InsufficientInstanceCapacity/i.test(said)
  const means = isShort ? `AWS has no ${fleet?.InstanceType ?? 'such instance'} to give${fleet?.AvailabilityZone ? ` in ${fleet.AvailabilityZone}` : ' in this zone'}` : 'AWS has started no instance'
  const again = at <= now + 1 ? `Everstep asks again now (${time} UTC)` : `Everstep asks again ${ago(at, now)} (${time} UTC)`
  return { title: waits ? sentence(waits).slice(0, -1) : undefined, text: `${means}. ${again}. AWS says: “${sentence(said)}”`, isShort }
}

function waitingOf({ job, fleet, now }: Facts): Statement | undefined {
  if (isOver(job) || job.SecondaryStatus === 'Training') return undefined
  if (job.SecondaryStatus === 'Paused') return { tone: 'idle', title: 'A person', text: 'Resume puts it back into the queue of its fleet; nothing else does.' }
  const parts = [job.Reason, fleet?.FleetStatus === 'active' ? undefined : fleet?.Reason].filter((part): part is string => Boolean(part))
  if (!parts.length) return undefined
  const told = reasonWords(parts[0]!, now, fleet)
  if (told.title) return { tone: 'busy', title: told.title, text: [told.text, ...parts.slice(1).map(sentence)].join(' ') }
  const [first = '', ...rest] = [...new Set(parts)].map(sentence)
  const colon = first.indexOf(': ')
  const isShort = colon > 0 && colon < 80 // “waits for 1 node: what AWS says”
  return { tone: 'busy', title: isShort ? first.slice(0, colon) : 'Waiting', text: [isShort ? sentence(first.slice(colon + 2)) : first, ...rest].join(' ') }
}

function bannersOf({ job, fleet, othersHit = [], staleSeconds = 0, refusal }: Facts): Statement[] {
  const banners: Statement[] = []
  if (staleSeconds > STALE_SECONDS) {
    const why = refusal ? `The control plane has refused for ${duration(staleSeconds)}: ${sentence(refusal)}` : `The control plane has not answered for ${duration(staleSeconds)}.`
    banners.push({ tone: 'bad', title: 'No news', text: `${why} What you see is old.` })
  }
  if (job.TakenOverTime !== undefined) {
    banners.push({ tone: 'warn', title: 'Automation is off for this job', text: `${job.TakenOverBy ?? 'A person'} has taken it over: Everstep observes it and decides nothing until it is handed back.` })
  }
  if (fleet?.FleetStatus === 'frozen') {
    const drift = (fleet.Drift ?? []).map(sentence).join(' ')
    banners.push({ tone: 'warn', title: `Fleet ${fleet.FleetName ?? ''} is frozen`.trim(), text: `Nothing is ended in it until this passes. ${sentence(fleet.Reason ?? '')} ${drift}`.trim() })
  }
  if (isLaunchSuspended(fleet)) banners.push({ tone: 'warn', title: `Fleet ${fleet?.FleetName ?? ''} starts no instances`, text: sentence(fleet?.Reason ?? '') })
  if (fleet?.FleetStatus === 'deleting') banners.push({ tone: 'warn', title: 'The fleet is being deleted', text: 'Its nodes are ended one by one.' })
  if (othersHit.length) {
    banners.push({ tone: 'warn', title: 'Wider than this job', text: `${plural(othersHit.length, 'other job')} of this fleet failed in the same way at the same time: ${othersHit.slice(0, 5).join(', ')}.` })
  }
  return banners
}

/** What begins in one job and cannot come from another one's trouble. */
const OWN_CAUSES = new Set(['drill', 'requested', 'pause_failed'])
/** One fault, as of a switch or a zone, is noticed in its jobs within this. */
const ALIKE_SECONDS = 300

/** Other jobs with an incident of the same cause that failed when this job's open one did, by name: a fault that is wider than the job. */
export function hitAlike(job: Partial<TrainingJob>, open: Incident | undefined, incidents: readonly Incident[], runsOfFleet: ReadonlySet<string>): string[] {
  if (open === undefined || OWN_CAUSES.has(open.Cause)) return []
  const alike = incidents.filter((each) => each.RunId !== job.RunId && runsOfFleet.has(each.RunId) && each.Cause === open.Cause && Math.abs(each.FailedAt - open.FailedAt) <= ALIKE_SECONDS)
  return [...new Set(alike.map((each) => each.TrainingJobName))]
}
